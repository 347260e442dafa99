"""The ancestor in the next column: one plain torch model, trained under either tool, each in its own interpreter."""
