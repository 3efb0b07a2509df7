"""Mixture-of-experts layers: routing, exchange of rows between expert ranks, grouped products."""
