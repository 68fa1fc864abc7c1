"""Which tile is computed when: what a shared tensor lets overlap, the order of tiles, the settings of a layer."""
