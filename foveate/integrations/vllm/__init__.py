"""foveate in vLLM: a plugin that decodes by a method and leaves all else to vLLM (docs/guide/serve.md)."""
