"""One file a section of the page: what it draws, says and tabulates, before any HTML."""
