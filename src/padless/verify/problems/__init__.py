"""Problems that checks draw: shapes, operands, guarded outputs, expected values."""
