"""The target model: loaded, run over batches, its keys and values pooled."""
