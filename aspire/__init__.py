"""ASPIRE."""
