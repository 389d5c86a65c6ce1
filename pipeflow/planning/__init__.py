"""Planning: models, clusters, the costs of layouts, the search for layouts, and where a model is cut. `pricing` plans
any module, and alone needs torch.
"""
