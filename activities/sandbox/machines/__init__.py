"""Tasks that bring a machine of their own: how its image is made, how it is prepared, and how it is graded."""
