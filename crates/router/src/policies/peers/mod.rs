//! What users would pick today: the routing policies of other systems, faithful to their published formulas and defaults.
//! One file each; its header names the source.

use super::Make;

/// The peers by name.
pub(super) const POLICIES: [(&str, Make); 0] = [];
