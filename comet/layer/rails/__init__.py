"""The ways of tokens between the nodes of a group."""
