"""The target: where its weights come from, and how they run."""
