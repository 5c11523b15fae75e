"""Places inside a module's forward: attention scores and patterns, experts."""
