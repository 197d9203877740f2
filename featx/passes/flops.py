"""How many operations each operator of torch takes: one table.

A FLOP is one multiplication or one addition of a matrix product, a convolution or an attention: a multiply-add is two,
as with `torch.utils.flop_counter`; biases and masks make no difference. Everything else that computes is counted apart,
as element-wise operations: so many for each element, whatever the function is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch

from featx.ir.overloads import tensors_among
from featx.passes.contractions import (
    added_batch_product,
    added_product,
    attention,
    attention_by_length,
    bilinear,
    convolution,
    encoder_layer,
    forward_convolution,
    fourier,
    grouped_product,
    inner_product,
    matrix_product,
    multi_head_attention,
    outer_product,
    recurrent,
)

Rule = Callable[..., int]
"""Takes the arguments of an operator and, as `result`, what it returned; returns FLOPs."""


class Operations(NamedTuple):
    """What one call takes: FLOPs, and element-wise operations."""

    flops: int = 0
    elementwise: int = 0


_CONTRACTIONS: dict[str, Rule] = {
    **dict.fromkeys(
        "mm bmm mv linear _scaled_mm _int_mm mkldnn_linear _mkldnn_linear _weight_int8pack_mm".split(), matrix_product
    ),
    **dict.fromkeys("addmm baddbmm addmv _addmm_activation".split(), added_product),
    "addbmm": added_batch_product,
    "addr": outer_product,
    **dict.fromkeys("_grouped_mm _scaled_grouped_mm".split(), grouped_product),
    **dict.fromkeys("dot vdot".split(), inner_product),
    **dict.fromkeys("convolution _convolution convolution_overrideable".split(), convolution),
    **dict.fromkeys(
        "cudnn_convolution mkldnn_convolution miopen_convolution _slow_conv2d_forward slow_conv3d_forward "
        "_conv_depthwise2d conv_depthwise3d slow_conv_dilated2d slow_conv_dilated3d cudnn_convolution_relu "
        "cudnn_convolution_add_relu".split(),
        forward_convolution,
    ),
    **dict.fromkeys(
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps".split(),
        attention,
    ),
    **dict.fromkeys("_flash_attention_forward _efficient_attention_forward".split(), attention_by_length),
    "_native_multi_head_attention": multi_head_attention,
    "_transformer_encoder_layer_fwd": encoder_layer,
    **dict.fromkeys("mkldnn_rnn_layer _cudnn_rnn".split(), recurrent),
    "_trilinear": bilinear,
    **dict.fromkeys("_fft_c2c _fft_r2c _fft_c2r".split(), fourier),
}
# Operations for each element of the result. Operators that torch tags as pointwise and that are not here take one.
_PER_RESULT: dict[str, int] = {
    **dict.fromkeys(
        "gelu relu hardswish hardsigmoid hardtanh hardshrink leaky_relu celu mish threshold _prelu_kernel glu "
        "log_sigmoid_forward rrelu_with_noise floor_divide rsub isin isinf isnan polar complex heaviside copysign "
        "gcd lcm bitwise_and bitwise_or bitwise_xor bitwise_not eq ne lt le gt ge abs _add_relu _masked_scale "
        "adaptive_max_pool2d adaptive_max_pool3d bucketize searchsorted".split(),
        1,
    ),
    **dict.fromkeys("native_dropout addcmul addcdiv _unsafe_masked_index tril triu".split(), 2),
    **dict.fromkeys("lerp _cdist_forward _pdist_forward _euclidean_dist upsample_linear1d".split(), 3),
    **dict.fromkeys("grid_sampler_2d upsample_bilinear2d _upsample_bilinear2d_aa".split(), 8),
    **dict.fromkeys("grid_sampler_3d upsample_trilinear3d _thnn_fused_lstm_cell _thnn_fused_gru_cell".split(), 16),
    **dict.fromkeys("upsample_bicubic2d _upsample_bicubic2d_aa _upsample_lanczos2d_aa".split(), 32),
}
# Operations for each element of the first input.
_PER_INPUT: dict[str, int] = {
    **dict.fromkeys(
        "sum nansum mean prod amax amin aminmax _aminmax max min argmax argmin any all cumsum cumprod cummax cummin "
        "_cummax_helper _cummin_helper count_nonzero trace median nanmedian mode kthvalue histc bincount "
        "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d nll_loss_forward nll_loss2d_forward "
        "_is_all_true _is_any_true col2im segment_reduce equal allclose".split(),
        1,
    ),
    **dict.fromkeys("norm linalg_vector_norm dist mse_loss batch_norm_elemt native_norm renorm".split(), 2),
    **dict.fromkeys(
        "var std var_mean std_mean logsumexp logcumsumexp _logcumsumexp smooth_l1_loss huber_loss soft_margin_loss "
        "binary_cross_entropy batch_norm_stats batch_norm_update_stats _weight_norm_interface".split(),
        3,
    ),
    **dict.fromkeys("_fused_rms_norm binary_cross_entropy_with_logits".split(), 4),
    **dict.fromkeys(
        "_softmax _safe_softmax _log_softmax _masked_softmax native_layer_norm native_group_norm cudnn_batch_norm "
        "miopen_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional "
        "_batch_norm_with_update".split(),
        5,
    ),
    **dict.fromkeys("_native_batch_norm_legit_no_training _batch_norm_no_update".split(), 2),
}
# Where the kernel stands among the arguments of a pooling operator; each result takes as many operations.
_POOLS = dict.fromkeys("avg_pool2d avg_pool3d max_pool2d_with_indices max_pool3d_with_indices".split(), 1)
# These make, move, choose or sort values, or draw them, and compute nothing. Views need not be here.
_MOVES = frozenset(
    "clone copy copy_ _to_copy _copy_from cat stack _stack _chunk_cat block_diag index _unsafe_index index_select "
    "index_put _index_put_impl _unsafe_index_put index_copy index_fill index_add index_reduce gather scatter "
    "scatter_add scatter_reduce take put embedding embedding_renorm _embedding_bag _embedding_bag_forward_only "
    "masked_fill masked_scatter masked_select where constant_pad_nd reflection_pad1d reflection_pad2d "
    "reflection_pad3d replication_pad1d replication_pad2d replication_pad3d roll flip rot90 repeat "
    "repeat_interleave channel_shuffle pixel_shuffle pixel_unshuffle im2col unsafe_split unsafe_split_with_sizes "
    "unfold diag_embed tril_indices triu_indices slice_scatter select_scatter diagonal_scatter as_strided_scatter "
    "max_unpool2d max_unpool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d affine_grid_generator sort topk unique_consecutive _unique "
    "_unique2 unique_dim nonzero nonzero_static _local_scalar_dense _assert_async _functional_assert_async arange "
    "linspace logspace range eye empty empty_like empty_strided empty_permuted new_empty new_empty_strided full "
    "full_like new_full ones ones_like new_ones zeros zeros_like new_zeros scalar_tensor fill zero "
    "_efficientzerotensor rand rand_like randn randn_like randint randint_like randperm normal uniform bernoulli "
    "multinomial poisson exponential random geometric cauchy log_normal binomial _standard_gamma _sample_dirichlet "
    "_unsafe_view _reshape_alias _reshape_copy view_copy set resize resize_as lift lift_fresh lift_fresh_copy "
    "detach alias contiguous _lazy_clone _pin_memory pin_memory record_stream is_same_size t transpose squeeze "
    "unsqueeze as_strided swapaxes split_copy split_with_sizes_copy unbind_copy slice_copy select_copy permute_copy "
    "expand_copy t_copy transpose_copy squeeze_copy unsqueeze_copy alias_copy view_as_real_copy "
    "view_as_complex_copy hann_window hamming_window blackman_window bartlett_window kaiser_window "
    "quantize_per_tensor quantize_per_channel dequantize int_repr _nested_tensor_from_mask to_padded_tensor "
    "_pack_padded_sequence rename fill_diagonal".split()
)


class FlopTable:
    """Counts the operations of calls.

    Args:
        rules: rules for operators (`torch.ops.mylib.attention`, or one overload of it), which go first.
    """

    def __init__(self, rules: Mapping[Any, Rule] | None = None) -> None:
        self._given = dict(rules or {})
        self._found: dict[Any, Callable[..., Operations] | None] = {}

    def count(self, overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Operations | None:
        """Return what a call of an operator takes; None if there is no rule for that operator."""
        if overload not in self._found:
            self._found[overload] = self._find(overload)
        rule = self._found[overload]
        return None if rule is None else rule(args, kwargs, result)

    def _find(self, overload: Any) -> Callable[..., Operations] | None:
        packet = getattr(overload, "_overloadpacket", overload)
        given = self._given.get(overload) or self._given.get(packet)
        if given is not None:
            return lambda args, kwargs, result: Operations(given(*args, **kwargs, result=result))
        if not isinstance(overload, torch._ops.OpOverload):
            return None
        namespace, _, name = overload._schema.name.partition("::")
        if namespace == "aten":
            # `add_` and `special_erf` take what `add` and `erf` take.
            found = _rule_of(name) or _rule_of(name.rstrip("_").removeprefix("special_"))
            if found is not None:
                return found
        if _is_view(overload) or namespace in ("prim", "prims"):
            return _nothing
        return _nothing if _is_made_for_checks(name) else _registered(packet)


def _rule_of(name: str) -> Callable[..., Operations] | None:
    if name in _MOVES:
        return _nothing
    contraction = _CONTRACTIONS.get(name)
    if contraction is not None:
        return lambda args, kwargs, result: Operations(contraction(*args, **kwargs, result=_first(result)))
    if name in _POOLS:
        return lambda args, kwargs, result: Operations(0, _first(result).numel() * _window(args, _first(result)))
    if name == "native_batch_norm":
        # Only in training are there statistics to find.
        return lambda args, kwargs, result: Operations(0, args[0].numel() * (5 if args[5] else 2))
    per_input = _PER_INPUT.get(name)
    if per_input is not None:
        return lambda args, kwargs, result: Operations(0, per_input * _first(args).numel())
    per_result = _PER_RESULT.get(name) or _is_pointwise(name)
    if per_result:
        return lambda args, kwargs, result: Operations(0, per_result * _first(result).numel())
    return None


def _nothing(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Operations:
    return Operations()


def _first(values: Any) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else next(tensors_among(values))


def _window(args: tuple[Any, ...], result: torch.Tensor) -> int:
    sizes = args[1]
    dims = result.dim() - 2
    return prod(sizes) if len(sizes) > 1 else sizes[0] ** dims


def _is_pointwise(name: str) -> int:
    packet: Any = getattr(torch.ops.aten, name, None)
    tags = [getattr(packet, each).tags for each in packet.overloads()] if packet is not None else []
    return int(any(torch.Tag.pointwise in each for each in tags))


def _is_view(overload: Any) -> bool:
    returned = overload._schema.returns
    return bool(returned) and all(
        result.alias_info is not None and not result.alias_info.is_write for result in returned
    )


def _is_made_for_checks(name: str) -> bool:
    return name.startswith(("sym_", "_assert", "is_"))


def _registered(packet: Any) -> Callable[..., Operations] | None:
    # What somebody has told torch's own counter of an operator of theirs.
    from torch.utils.flop_counter import flop_registry

    formula: Any = flop_registry.get(packet)
    if formula is None:
        return None
    return lambda args, kwargs, result: Operations(formula(*args, **kwargs, out_val=result))
