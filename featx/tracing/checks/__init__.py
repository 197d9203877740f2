"""What is checked when an example was traced: what lives on, and which sizes and dtypes are free."""
