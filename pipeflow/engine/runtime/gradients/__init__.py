"""Operations on gradients that involve other ranks."""
