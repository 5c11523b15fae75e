"""Hook points: their names, and whose hooks are whose."""
