"""placeholder"""
def listing(state): return []
def summary(context, attempt): return {}
