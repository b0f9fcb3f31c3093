// Step 18: L2 promotion. The tensor maps ask for 256-byte fetches into L2 (steps.json), the length of one row of a tile, so
// that the second 64-column box of a tile finds its half of the row there. The kernel is step 17's to the letter.
#define ladder_17_phase_bits ladder_18_l2_promotion
#include "17_phase_bits.cu"
