"""Other people's models: what their modules do with attention, in clearhead's words."""
