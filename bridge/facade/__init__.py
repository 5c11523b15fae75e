"""The methods of a `TransformerBridge`, subject by subject. Each delegates to the room that does the work."""
