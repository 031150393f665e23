"""The audit: what was learned layer by layer, and can the measurement be believed."""
