"""A fitness coach that answers from recorded data through a small tool-calling model."""
