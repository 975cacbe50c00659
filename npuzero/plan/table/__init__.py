"""The table: placements of training state over mesh axes and memories."""
