"""The contract shared by every Portlab package: recipe, data, tool-call formats, metrics, model table."""
