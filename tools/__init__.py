"""How the library is made and measured, and no part of it."""
