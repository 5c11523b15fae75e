"""Hook points: their names, and the scope of hooks."""
