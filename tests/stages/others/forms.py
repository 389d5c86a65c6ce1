"""All forms of models of other libraries."""

from __future__ import annotations

from tests.stages.others.forms_diffusers import DIFFUSERS
from tests.stages.others.forms_images import IMAGES
from tests.stages.others.forms_sequences import SEQUENCES

FORMS = [*IMAGES, *DIFFUSERS, *SEQUENCES]
