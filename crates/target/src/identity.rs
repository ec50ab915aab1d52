//! Default names and identifiers: NQN, UUIDs, NGUIDs, serial number.
//!
//! They are derived from the machine and the configuration, so that they stay the same over
//! restarts: hosts mount by them.

use std::fs;

use uuid::Uuid;

/// Number of hexadecimal digits in a default serial number: the length of NVMe's field for it.
const SERIAL_DIGITS: usize = 20;

/// The default NQN of the subsystem: one for each machine and first listen address.
pub(crate) fn default_subnqn(listen: &str) -> String {
    let uuid = derive_uuid(&["subsystem", &machine_id(), listen]);
    format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}")
}

/// The default UUID of a namespace, which follows from the subsystem and the namespace identifier.
pub(crate) fn namespace_uuid(subnqn: &str, nsid: u32) -> Uuid {
    derive_uuid(&["namespace", subnqn, &nsid.to_string()])
}

/// The default NGUID of a namespace, which follows from its UUID.
pub(crate) fn namespace_nguid(uuid: &Uuid) -> [u8; 16] {
    *derive_uuid(&["nguid", &uuid.to_string()]).as_bytes()
}

/// The default serial number of the subsystem, which follows from its NQN.
pub(crate) fn serial(subnqn: &str) -> String {
    let uuid = derive_uuid(&["serial", subnqn]);
    uuid.simple().to_string()[..SERIAL_DIGITS].to_ascii_uppercase()
}

/// An identifier of this machine; empty if there is none, as in some containers.
fn machine_id() -> String {
    ["/etc/machine-id", "/var/lib/dbus/machine-id"]
        .iter()
        .find_map(|path| fs::read_to_string(path).ok())
        .or_else(|| fs::read_to_string("/proc/sys/kernel/hostname").ok())
        .map(|text| text.trim().to_owned())
        .unwrap_or_default()
}

/// A UUID of version 8 (custom) that is a hash of the parts: FNV-1a with 128 bits. The hash needs a
/// good distribution, not secrecy.
fn derive_uuid(parts: &[&str]) -> Uuid {
    // The parameters of FNV-1a for 128 bits.
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    const OFFSET_BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    let mut hash = OFFSET_BASIS;
    for part in parts {
        // The separator 0 distinguishes ("ab", "c") from ("a", "bc").
        for byte in part.bytes().chain([0]) {
            hash = (hash ^ u128::from(byte)).wrapping_mul(PRIME);
        }
    }
    let mut bytes = hash.to_be_bytes();
    // The fields `ver` (version 8) and `var` of RFC 9562.
    bytes[6] = bytes[6] & 0x0f | 0x80;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    Uuid::from_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_stable_and_distinct() {
        let nqn = default_subnqn("127.0.0.1:4420");
        assert_eq!(nqn, default_subnqn("127.0.0.1:4420"));
        assert_ne!(nqn, default_subnqn("127.0.0.1:4421"));
        riopipe_nvme::fabrics::check_nqn(&nqn).unwrap();
        let (one, two) = (namespace_uuid(&nqn, 1), namespace_uuid(&nqn, 2));
        assert_ne!(one, two);
        assert_eq!(one.get_version_num(), 8);
        assert_ne!(namespace_nguid(&one), *one.as_bytes());
        assert_eq!(serial(&nqn).len(), 20);
        // Fixed for ever: hosts mount by these names.
        assert_eq!(
            namespace_uuid("nqn.2026-01.io.example:a", 1).to_string(),
            "ab69a942-055e-82c4-ab63-7291487b9e31"
        );
    }
}
