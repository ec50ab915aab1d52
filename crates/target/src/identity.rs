//! Default names and identifiers that follow from the machine and the configuration: NQN, serial
//! number, and the UUIDs and NGUIDs of drives that have no identity of their own
//! ([`mod@crate::drive_identity`]). They stay the same over restarts.

use std::fs;

use riopipe_session::drive_identity::derived_uuid;
use uuid::Uuid;

/// Number of hexadecimal digits in a default serial number: the length of NVMe's field for it.
const SERIAL_DIGITS: usize = 20;

/// The default NQN of the subsystem: one for each machine and first listen address.
pub(crate) fn default_subnqn(listen: &str) -> String {
    let uuid = derive_uuid(&["subsystem", &machine_id(), listen]);
    format!("nqn.2014-08.org.nvmexpress:uuid:{uuid}")
}

/// The UUID of a namespace that follows from the subsystem and the namespace identifier.
pub(crate) fn namespace_uuid(subnqn: &str, nsid: u32) -> Uuid {
    derive_uuid(&["namespace", subnqn, &nsid.to_string()])
}

/// The NGUID of a namespace that follows from its UUID.
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

/// A UUID that is a hash of the parts.
fn derive_uuid(parts: &[&str]) -> Uuid {
    let parts: Vec<&[u8]> = parts.iter().map(|part| part.as_bytes()).collect();
    Uuid::from_bytes(derived_uuid(&parts))
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
