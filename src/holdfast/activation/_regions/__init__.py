"""What checkpoint() does: a call is noted as a region, and replayed exactly."""
