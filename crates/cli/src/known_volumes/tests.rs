use super::*;

fn volume(id: &str) -> KnownVolume {
    KnownVolume {
        id: Some(id.to_owned()),
        members: vec![format!("192.0.2.1:4420,ns={}", id.len()), "[::1]:7,ns=2".to_owned()],
        ..KnownVolume::default()
    }
}

fn only(path: &Path) -> Places {
    Places::from(Some(path), |_| None)
}

#[test]
fn the_option_the_variable_and_the_usual_places_in_this_order() {
    let with = |option: Option<&str>, set: &[(&str, &str)]| {
        let variable = |name: &str| {
            let found = set.iter().find(|(set, _)| *set == name);
            found.map(|(_, value)| OsString::from(value))
        };
        let places = Places::from(option.map(Path::new), variable);
        places.paths().map(|path| path.display().to_string()).collect::<Vec<_>>()
    };
    let home = ("HOME", "/h");
    assert_eq!(with(None, &[home]), ["/h/.config/rio/volumes.toml", SYSTEM_FILE]);
    let config = ("XDG_CONFIG_HOME", "/c");
    assert_eq!(with(None, &[home, config]), ["/c/rio/volumes.toml", SYSTEM_FILE]);
    let relative = ("XDG_CONFIG_HOME", "c");
    assert_eq!(with(None, &[home, relative])[0], "/h/.config/rio/volumes.toml");
    assert_eq!(with(None, &[home, config, (VARIABLE, "/v")]), ["/v"]);
    assert_eq!(with(Some("o"), &[home, (VARIABLE, "/v")]), ["o"]);
    assert!(with(None, &[home, (VARIABLE, "")]).is_empty(), "the variable is empty: no file");
    assert_eq!(with(None, &[]), [SYSTEM_FILE]);
    let nowhere = Places::from(None, |_| None);
    assert!(matches!(nowhere.keep("v", &volume("1")), Err(KnownError::NoPlace)));
    let disabled = Places::from(None, |name| (name == VARIABLE).then(OsString::new));
    assert!(matches!(disabled.keep("v", &volume("1")), Ok(None)));
}

#[test]
fn entries_are_kept_renamed_and_forgotten_by_name_and_id() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/b/volumes.toml");
    let places = only(&path);
    assert_eq!(places.find("v").unwrap(), None);
    assert!(!places.forget("v", "1").unwrap() && !path.exists());
    let full = KnownVolume {
        hostnqn: Some("nqn.2026-11.com.example:h".to_owned()),
        hostid: Some("0".repeat(32)),
        hdr_digest: true,
        data_digest: Some(StoredDigest::Off),
        ..volume("1")
    };
    assert_eq!(places.keep("v", &full).unwrap().unwrap().replaced, None);
    places.keep("w \"quoted\"", &volume("22")).unwrap();
    assert_eq!(places.find("v").unwrap(), Some(full.clone()));
    assert_eq!(places.find("w \"quoted\"").unwrap(), Some(volume("22")));
    // The same volume again is no other one; a volume of another id is.
    assert_eq!(places.keep("v", &full).unwrap().unwrap().replaced, None);
    assert_eq!(places.keep("v", &volume("3")).unwrap().unwrap().replaced, Some(full));

    assert!(!places.rename("v", "x", "1").unwrap(), "another volume");
    assert!(matches!(
        places.rename("v", "w \"quoted\"", "3"),
        Err(KnownError::NameTaken { name, .. }) if name == "w \"quoted\""
    ));
    assert!(places.rename("v", "x", "3").unwrap());
    assert_eq!((places.find("v").unwrap(), places.find("x").unwrap()), (None, Some(volume("3"))));
    assert!(!places.forget("x", "1").unwrap());
    assert!(places.forget("x", "3").unwrap());
    let names: Vec<_> = places.list().unwrap().into_keys().collect();
    assert_eq!(names, ["w \"quoted\""]);
    // Nothing else is left in the folder.
    let mut left: Vec<_> =
        fs::read_dir(path.parent().unwrap()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["volumes.toml", "volumes.toml.lock"]);
}

#[test]
fn the_own_file_comes_before_the_one_of_the_system() {
    let folder = tempfile::tempdir().unwrap();
    let (own, system) = (folder.path().join("own"), folder.path().join("system"));
    only(&system).keep("v", &volume("1")).unwrap();
    only(&system).keep("w", &volume("22")).unwrap();
    only(&own).keep("v", &volume("333")).unwrap();
    let both = Places { own: Some(own), system: Some(system), is_disabled: false };
    assert_eq!(both.find("v").unwrap(), Some(volume("333")));
    assert_eq!(both.find("w").unwrap(), Some(volume("22")));
    assert_eq!(both.list().unwrap().len(), 2);
    assert!(!both.forget("w", "22").unwrap(), "the file of the system is only read");
}

#[test]
fn a_damaged_file_is_named_with_line_and_column_and_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("volumes.toml");
    for (text, line, column) in [
        (&b"[volumes.v]\nmembers = [\"a\"]\nmember = 1\n"[..], 3, 1),
        (b"[volumes.v]\nmembers = 7\n", 2, 11),
        (b"\n[volumes.v\n", 2, 11),
        (b"[volumes.v]\nmembers = [\"\xff\"]\n", 2, 13),
    ] {
        fs::write(&path, text).unwrap();
        for error in
            [only(&path).find("v").unwrap_err(), only(&path).keep("w", &volume("1")).unwrap_err()]
        {
            let KnownError::Damaged { line: l, column: c, .. } = &error else { panic!("{error}") };
            assert_eq!((*l, *c), (line, column), "{error}");
            assert!(error.to_string().contains("volumes.toml, line"), "{error}");
        }
        assert_eq!(fs::read(&path).unwrap(), text);
    }
    fs::write(&path, "version = 2\nnews = 1\n").unwrap();
    let error = only(&path).keep("w", &volume("1")).unwrap_err();
    assert!(matches!(error, KnownError::Newer { version: 2, .. }), "{error}");
    // Nor is a device replaced by a file.
    let error = only(Path::new("/dev/null")).keep("w", &volume("1")).unwrap_err();
    assert!(matches!(error, KnownError::NotAFile(_)), "{error}");
}

#[test]
fn changes_at_the_same_time_lose_no_entry() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("volumes.toml");
    thread::scope(|scope| {
        for thread in 0..8 {
            let places = only(&path);
            scope.spawn(move || {
                for n in 0..8 {
                    places.keep(&format!("v{thread}-{n}"), &volume("1")).unwrap();
                }
            });
        }
    });
    assert_eq!(only(&path).list().unwrap().len(), 64);
}

#[test]
fn a_link_and_the_permissions_stay() {
    let folder = tempfile::tempdir().unwrap();
    let (file, link) = (folder.path().join("file"), folder.path().join("link"));
    only(&file).keep("v", &volume("1")).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    only(&link).keep("w", &volume("1")).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(only(&file).list().unwrap().len(), 2);
}
