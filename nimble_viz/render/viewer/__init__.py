"""The page's viewer: JavaScript, styles and template."""
