"""Weight files: read, export and convert safetensors."""
