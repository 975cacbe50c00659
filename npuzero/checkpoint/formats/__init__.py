"""File formats: torch archives, safetensors, items of a checkpoint."""
