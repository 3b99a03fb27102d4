"""A syntax tree to executable Python."""
