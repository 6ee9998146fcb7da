"""What a step is to drop so that it fits a byte budget: chosen, applied and measured."""
