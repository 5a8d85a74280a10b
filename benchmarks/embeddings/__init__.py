"""Embeddings of texts by Quire and by other projects."""
