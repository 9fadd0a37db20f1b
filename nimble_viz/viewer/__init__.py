"""The viewer: one page of our own JavaScript and CSS that draws every view, as package data."""
