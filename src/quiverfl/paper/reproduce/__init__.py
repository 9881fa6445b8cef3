"""The paper's tables and figures: which cells they need, and how they are written."""
