"""Read and write the file formats of checkpoints: items in torch archives, safe pickles, safetensors."""
