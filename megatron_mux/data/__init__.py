"""From files to token sequences: records, tokens, data sets, sampling."""
