"""The engine: requests in, tokens and text out, page movements at the boundaries between compiled steps."""
