"""Numbers and inputs that are followed, and the checks that a graph makes when it runs."""
