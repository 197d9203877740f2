"""Every error that featx raises, as one tree, and the warning that has a class of its own.

FeatxError
├── GraphError              RuntimeError    a graph is malformed, or an edit would make it so
│   ├── NodeInUseError                      erasing a node that others still read
│   ├── ForeignNodeError    AssertionError  a node of another graph, or one that was erased
│   ├── OpcodeError         AssertionError  a node with an opcode that there is not
│   └── TargetError         AttributeError  a call_module or get_attr target that does not exist
├── ArgumentTypeError       TypeError       an argument of the wrong kind, or a value that no code can express
│   ├── NodeTargetError     ValueError      a node whose target is of the wrong kind for its opcode
│   ├── RootError           RuntimeError    a GraphModule is made of something that is no root
│   ├── UnsupportedArgumentError NotImplementedError  a value that a traced call gets and no graph can hold
│   └── InputError          RuntimeError    a graph is run on other inputs than it takes
├── TraceError              ValueError      a trace cannot go on
│   ├── ControlFlowError    TypeError, RuntimeError  Python asked a traced value for its bool, length, int or type
│   ├── MutationError       RuntimeError    a call writes its arguments, which the tracer was told to refuse
│   ├── ModulePathError     NameError       a module or parameter that the root does not own
│   └── SpecializationError RuntimeError    an input for which the model would do something else than was traced
├── PassError               RuntimeError    a pass that cannot do what was asked, or that broke the graph
├── CostError               RuntimeError    an operator without a rule for its cost
├── MissingExtraError       ImportError     a package that only some of featx needs is not installed
├── ExtractionError         RuntimeError    features of a data set that cannot be computed, written or read
├── OptimizationError       RuntimeError    an extractor that cannot be optimized, or a plan for another one
├── DrawingError            RuntimeError    a picture that cannot be made: a missing program, or too much in it
├── ScriptError             RuntimeError    a graph that torch.jit.script cannot express
├── PatternError            ValueError      a pattern that cannot be looked for, or a replacement that does not fit it
├── LeftOutError            AttributeError  a name of torch.fx that `featx.fx` does not have, read as an attribute
├── LeftOutImportError      ImportError     the same, imported
└── RequestError            ValueError, AssertionError  a feature request that is empty or contradicts itself
    └── NodeNameError       KeyError        a name that the model does not have in this mode
        └── DrawnAwayError                  one that it may have next time, as it decides by random numbers what runs

Each class also derives from the built-in that callers of torch.fx and torchvision catch today.
A message names the object, what was expected, and the next step.
"""


class FeatxError(Exception):
    """What every error of featx derives from."""

    def __str__(self) -> str:
        # KeyError would print the repr of the message.
        return Exception.__str__(self)


class GraphError(FeatxError, RuntimeError):
    """A graph is malformed, or an edit would make it so."""


class NodeInUseError(GraphError):
    """A node cannot be erased because other nodes read it."""


class ForeignNodeError(GraphError, AssertionError):
    """A node belongs to another graph, or was erased from this one."""


class OpcodeError(GraphError, AssertionError):
    """A node has an opcode that is none of the six that there are."""


class TargetError(GraphError, AttributeError):
    """A `call_module` or `get_attr` target does not exist in the module."""


class ArgumentTypeError(FeatxError, TypeError):
    """An argument has the wrong type, or cannot be written as code."""


class NodeTargetError(ArgumentTypeError, ValueError):
    """The target of a node is of the wrong kind for its opcode."""


class RootError(ArgumentTypeError, RuntimeError):
    """A GraphModule is made of something that is neither a module nor a dict of targets."""


class UnsupportedArgumentError(ArgumentTypeError, NotImplementedError):
    """A traced call gets a value that no graph can hold."""


class InputError(ArgumentTypeError, RuntimeError):
    """A graph is run on other inputs than it takes."""


class TraceError(FeatxError, ValueError):
    """A trace cannot go on."""


class ControlFlowError(TraceError, TypeError, RuntimeError):
    """Python needs the value of something that is only a symbol during the trace."""


class MutationError(TraceError, RuntimeError):
    """A call writes its arguments: a tracer was told to refuse that, or it has changed a value that is returned."""


class ModulePathError(TraceError, NameError):
    """A module or parameter that runs in the model is not registered in it."""


class SpecializationError(TraceError, RuntimeError):
    """An input for which the model would do something else than it did when it was traced."""


class PassError(FeatxError, RuntimeError):
    """A pass cannot do what was asked with this graph, or left a graph that cannot run."""


class CostError(FeatxError, RuntimeError):
    """An operator runs for which there is no rule of its cost."""


class MissingExtraError(FeatxError, ImportError):
    """A package that only some of featx needs is not installed."""


class ExtractionError(FeatxError, RuntimeError):
    """Features of a data set cannot be computed, written or read."""


class OptimizationError(FeatxError, RuntimeError):
    """An extractor cannot be optimized, or a plan was made for another one."""


class DrawingError(FeatxError, RuntimeError):
    """A picture cannot be made: a program is missing, or there is too much in it."""


class ScriptError(FeatxError, RuntimeError):
    """A graph holds something that TorchScript cannot express."""


class PatternError(FeatxError, ValueError):
    """A pattern that cannot be looked for, or a replacement that does not fit it."""


class LeftOutError(FeatxError, AttributeError):
    """A name of torch.fx that `featx.fx` does not have is read as an attribute."""


class LeftOutImportError(FeatxError, ImportError):
    """A name of torch.fx that `featx.fx` does not have is imported."""


class RequestError(FeatxError, ValueError, AssertionError):
    """A request for features is empty or contradicts itself."""


class NodeNameError(RequestError, KeyError):
    """No node has the requested name in this mode.

    Attributes:
        name: that name; empty where the error is about several.
        kept_whole: the paths of modules that the trace could not look into; the name may lie in one of them.
    """

    def __init__(self, message: str, name: str = "", kept_whole: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.kept_whole = kept_whole


class DrawnAwayError(NodeNameError):
    """No node has the requested name where Python has decided by random numbers what runs, as with dropped layers."""


class SlowTraceWarning(UserWarning):
    """An extractor has traced its model again for an input of another kind, which took more than two seconds."""
