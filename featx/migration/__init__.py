"""What code written against torch.fx finds under `featx.fx`, and why the rest of torch.fx is not there."""
