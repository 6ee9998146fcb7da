"""The formats that are torch's own: ``torch.save`` files and DCP folders. Loads torch."""
