//! The Diffie-Hellman groups of RFC 7919.
//!
//! The prime of a group with *n* bits is 2ⁿ − 2ⁿ⁻⁶⁴ + (⌊2ⁿ⁻¹³⁰·e⌋ + X)·2⁶⁴ − 1 (RFC 7919, appendix A). So
//! its first and last 64 bits are ones, and the bits between are those of *e*, with X − 1 added. The
//! generator is 2.

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

use crypto_bigint::modular::{BoxedMontyForm, BoxedMontyParams};
use crypto_bigint::{BoxedUint, Odd, Resize};
use riopipe_nvme::auth::GroupId;
use zeroize::Zeroizing;

/// Length of a private exponent, in bytes. RFC 7919 (§5.2) wants at least 400 bits for the largest group.
const EXPONENT_LEN: usize = 64;
/// Bytes of ones at each end of a prime.
const ONES: usize = 8;
/// ⌊2⁸⁰⁶²·e⌋, in hexadecimal digits. Shorter groups use its first digits.
const E: &str = "\
     adf85458a2bb4a9aafdc5620273d3cf1d8b9c583ce2d3695a9e13641146433fbcc939dce249b3ef97d2fe363630c75d8\
     f681b202aec4617ad3df1ed5d5fd65612433f51f5f066ed0856365553ded1af3b557135e7f57c935984f0c70e0e68b77\
     e2a689daf3efe8721df158a136ade73530acca4f483a797abc0ab182b324fb61d108a94bb2c8e3fbb96adab760d7f468\
     1d4f42a3de394df4ae56ede76372bb190b07a7c8ee0a6d709e02fce1cdf7e2ecc03404cd28342f619172fe9ce98583ff\
     8e4f1232eef28183c3fe3b1b4c6fad733bb5fcbc2ec22005c58ef1837d1683b2c6f34a26c1b2effa886b4238611fcfdc\
     de355b3b6519035bbc34f4def99c023861b46fc9d6e6c9077ad91d2691f7f7ee598cb0fac186d91caefe130985139270\
     b4130c93bc437944f4fd4452e2d74dd364f2e21e71f54bff5cae82ab9c9df69ee86d2bc522363a0dabc521979b0deada\
     1dbf9a42d5c4484e0abcd06bfa53ddef3c1b20ee3fd59d7c25e41d2b669e1ef16e6f52c3164df4fb7930e9e4e58857b6\
     ac7d5f42d69f6d187763cf1d5503400487f55ba57e31cc7a7135c886efb4318aed6a1e012d9e6832a907600a918130c4\
     6dc778f971ad0038092999a333cb8b7a1a1db93d7140003c2a4ecea9f98d0acc0a8291cdcec97dcf8ec9b55a7f88a46b\
     4db5a851f44182e1c68a007e5e0dd9020bfd64b645036c7a4e677d2c38532a3a23ba4442caf53ea63bb454329b7624c8\
     917bdd64b1c0fd4cb38e8c334c701c3acdad0657fccfec719b1f5c3e4e46041f388147fb4cfdb477a52471f7a9a96910\
     b855322edb6340d8a00ef092350511e30abec1fff9e3a26e7fb29f8c183023c3587e38da0077d9b4763e4e4b94b2bbc1\
     94c6651e77caf992eeaac0232a281bf6b3a739c1226116820ae8db5847a67cbef9c9091b462d538cd72b03746ae77f5e\
     62292c311562a846505dc82db854338ae49f5235c95b91178ccf2dd5cacef403ec9d1810c6272b045b3b71f9dc6b80d6\
     3fdd4a8e9adb1e6962a69526d43161c1a41d570d7938dad4a40e329ccff46aaa36ad004cf600c8381e425a31d951ae64\
     fdb23fcec9509d43687feb69edd1cc5e0b8cc3bdf64b10ef86b63142a3ab8829555b2f747c932665cb2c0f1cc01bd702\
     29388839d2af05e454504ac78b7582822846c0ba35c35f5c59160cc046fd8251541fc68c9c86b022bb7099876a460e74\
     51a8a93109703fee1c217e6c3826e52c51aa691e0e423cfc99e9e31650c1217b624816cdad9a95f9d5b8019488d9c0a0\
     a1fe3075a577e23183f81d4a3f2fa4571efc8ce0ba8a4fe8b6855dfe72b0a66eded2fbabfbe58a30fafabe1c5d71a87e\
     2f741ef8c1fe86fea6bbfde530677f0d97d11d49f7a8443d0822e506a9f4614e011e2a94838ff88cd68c8bb7c51eef6d";

/// A private exponent.
pub type Exponent = Zeroizing<[u8; EXPONENT_LEN]>;

/// A new private exponent.
#[must_use]
pub fn random_exponent(random: super::Random) -> Exponent {
    let mut exponent = Zeroizing::new([0; EXPONENT_LEN]);
    random(&mut exponent[..]);
    exponent
}

/// The number X of a group.
const fn x_of(group: GroupId) -> u32 {
    match group {
        GroupId::Null => 0,
        GroupId::Ffdhe2048 => 560_316,
        GroupId::Ffdhe3072 => 2_625_351,
        GroupId::Ffdhe4096 => 5_736_041,
        GroupId::Ffdhe6144 => 15_705_020,
        GroupId::Ffdhe8192 => 10_965_728,
    }
}

/// The prime of a group, big endian.
fn prime(group: GroupId) -> Vec<u8> {
    let len = group.len_bytes();
    let digits = E.as_bytes();
    let digit = |at: usize| char::from(digits[at]).to_digit(16).unwrap_or(0) as u8;
    let mut bytes = vec![0xff; len];
    for (at, byte) in bytes[ONES..len - ONES].iter_mut().enumerate() {
        *byte = digit(2 * at) << 4 | digit(2 * at + 1);
    }
    let mut carry = x_of(group) - 1;
    for byte in bytes[ONES..len - ONES].iter_mut().rev() {
        let sum = u32::from(*byte) + (carry & 0xff);
        *byte = sum as u8;
        carry = (carry >> 8) + (sum >> 8);
    }
    bytes
}

/// A DH value of a peer that no honest peer sends: 0, 1, the prime less 1, or beyond the prime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the peer's Diffie-Hellman value is not valid")]
pub struct BadDhValue;

/// The DH value of a private exponent: what the other side gets. Empty for [`GroupId::Null`].
#[must_use]
pub fn public_value(group: GroupId, exponent: &Exponent) -> Vec<u8> {
    if group == GroupId::Null {
        return Vec::new();
    }
    let mut base = vec![0; group.len_bytes()];
    if let Some(last) = base.last_mut() {
        *last = 2;
    }
    power(group, &base, exponent).to_vec()
}

/// The secret that both sides share, with as many bytes as the group. Empty for [`GroupId::Null`].
///
/// # Errors
/// [`BadDhValue`]: the session key would be known to others.
pub fn shared_secret(
    group: GroupId,
    exponent: &Exponent,
    peer_value: &[u8],
) -> Result<Zeroizing<Vec<u8>>, BadDhValue> {
    if peer_value.len() != group.len_bytes() {
        return Err(BadDhValue);
    }
    if group == GroupId::Null {
        return Ok(Zeroizing::default());
    }
    // The value is public, so this comparison need not take the same time for all values.
    let mut last = prime(group);
    if let Some(byte) = last.last_mut() {
        // A prime is odd.
        *byte -= 1;
    }
    let mut one = vec![0; group.len_bytes()];
    if let Some(byte) = one.last_mut() {
        *byte = 1;
    }
    if peer_value <= &one[..] || peer_value >= &last[..] {
        return Err(BadDhValue);
    }
    Ok(power(group, peer_value, exponent))
}

/// `base` to the power of `exponent`, modulo the prime of the group. The time does not depend on either.
fn power(group: GroupId, base: &[u8], exponent: &Exponent) -> Zeroizing<Vec<u8>> {
    let bits = 8 * group.len_bytes() as u32;
    let number = |bytes: &[u8]| {
        // The bytes are as long as the group, so this cannot fail.
        BoxedUint::from_be_slice(bytes, bits)
            .unwrap_or_else(|_| BoxedUint::zero_with_precision(bits))
    };
    let modulus = number(&prime(group));
    let Some(modulus) = Odd::new(modulus).into_option() else { return Zeroizing::default() };
    let params = BoxedMontyParams::new(modulus);
    let exponent = Zeroizing::new(
        BoxedUint::from_be_slice(&exponent[..], 8 * EXPONENT_LEN as u32)
            .unwrap_or_else(|_| BoxedUint::zero_with_precision(bits)),
    );
    let power = BoxedMontyForm::new(number(base), &params).pow(&exponent);
    let power = Zeroizing::new(power.retrieve().resize(bits));
    Zeroizing::new(Vec::from(power.to_be_bytes()))
}

/// An exponentiation that a shell carries out for a connection, on any thread.
pub struct DhJob {
    /// The number of the job, which comes back in its result.
    pub(super) number: u64,
    pub(super) group: GroupId,
    pub(super) exponent: Exponent,
    /// The peer's DH value; `None` to compute the own one.
    pub(super) peer_value: Option<Box<[u8]>>,
}

/// The result of a [`DhJob`].
pub struct DhDone {
    pub(super) number: u64,
    pub(super) value: Result<Zeroizing<Vec<u8>>, BadDhValue>,
}

impl DhJob {
    /// Computes the result. This takes up to tens of milliseconds of a processor, for the largest group.
    #[must_use]
    pub fn run(self) -> DhDone {
        let Self { number, group, exponent, peer_value } = self;
        let value = match peer_value {
            None => Ok(Zeroizing::new(public_value(group, &exponent))),
            Some(value) => shared_secret(group, &exponent, &value),
        };
        DhDone { number, value }
    }
}

impl fmt::Debug for DhJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DhJob").field("group", &self.group).finish_non_exhaustive()
    }
}

impl fmt::Debug for DhDone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DhDone").field("number", &self.number).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};
    use std::string::String;

    use super::*;

    const GROUPS: [GroupId; 5] = [
        GroupId::Ffdhe2048,
        GroupId::Ffdhe3072,
        GroupId::Ffdhe4096,
        GroupId::Ffdhe6144,
        GroupId::Ffdhe8192,
    ];

    fn exponent(byte: u8) -> Exponent {
        Zeroizing::new([byte; EXPONENT_LEN])
    }

    /// The digests were computed by another program, which also showed that each prime is a safe one.
    #[test]
    fn the_primes_are_those_of_the_rfc() {
        let digests = [
            "9cd3b7f336872f46c09428d1bbc19877a4d440512cda8d1c1cf0cd6e33698966",
            "0eaf67db3a839156d5013494a5318a772b5697d270d721f37f092efc69ea5a17",
            "4648414224ac881b3d0dc59b466f96d06a558278776807797ecf1f66ff397b3e",
            "227ac9066b3ddd9e193670cda2388fa884f65ba0cf98b742d1fe77a6687c79c7",
            "770b14efaf6f049929c523113b3fa99a8d11dab1b18af3609590122075d19833",
        ];
        for (group, digest) in GROUPS.into_iter().zip(digests) {
            let hex = |byte: &u8| std::format!("{byte:02x}");
            let found: String = Sha256::digest(prime(group)).iter().map(hex).collect();
            assert_eq!(found, digest, "{group:?}");
        }
    }

    #[test]
    fn both_sides_get_the_same_secret() {
        for group in GROUPS {
            let (first, second) = (exponent(0x5a), exponent(0xc3));
            let values = (public_value(group, &first), public_value(group, &second));
            let secret = shared_secret(group, &first, &values.1).unwrap();
            assert_eq!(secret.len(), group.len_bytes());
            assert_eq!(secret, shared_secret(group, &second, &values.0).unwrap());
            assert_ne!(values.0, values.1);
        }
        assert_eq!(shared_secret(GroupId::Null, &exponent(1), &[]).unwrap().len(), 0);
    }

    /// The value was computed by another program.
    #[test]
    fn a_known_power() {
        let value = public_value(GroupId::Ffdhe2048, &exponent(0x5a));
        let hex = |byte: &u8| std::format!("{byte:02x}");
        let found: String = Sha256::digest(value).iter().map(hex).collect();
        assert_eq!(found, KNOWN_POWER);
    }

    const KNOWN_POWER: &str = "128d5210732d85f77e39ad91fb0eef03c70ae7b8469edae9d7c7d1a7720bb3c5";

    #[test]
    fn t18_a_value_with_a_known_power_is_refused() {
        for group in [GroupId::Ffdhe2048, GroupId::Ffdhe8192] {
            let len = group.len_bytes();
            let number = |last: u8| {
                let mut bytes = vec![0; len];
                bytes[len - 1] = last;
                bytes
            };
            let mut minus_one = prime(group);
            minus_one[len - 1] -= 1;
            let bad = [number(0), number(1), minus_one, prime(group), vec![0xff; len], vec![2; 3]];
            for value in bad {
                assert_eq!(shared_secret(group, &exponent(7), &value), Err(BadDhValue));
            }
            assert!(shared_secret(group, &exponent(7), &number(2)).is_ok());
        }
    }
}
