"""PTX text to a syntax tree."""
