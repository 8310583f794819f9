"""One evaluation in several processes, on one machine or several.

- `launch`: how are they started, and what is said when one fails?
- `ranks`: how do they end together?
"""
