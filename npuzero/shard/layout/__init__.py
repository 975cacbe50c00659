"""Layout of flat parameters: units, slots, shard specs and the relations of axes."""
