"""Read, export and convert unsharded weights in safetensors files."""
