"""The training step that updates each layer inside the backward pass, and the ordinary one with the same options."""
