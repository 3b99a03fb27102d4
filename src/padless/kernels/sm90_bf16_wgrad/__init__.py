"""Weight gradients of grouped layers on Hopper, bf16 rows as they are."""
