"""Tables of bytes: what lasts on a rank, and what passes keep and take. Data, without torch; `estimate` fills them."""
