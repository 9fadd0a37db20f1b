"""From that data to a page, text and widgets; and the Report that shows itself."""
